"""Vision-language models: images and a text in, a text out. One artifact of three graphs, as onnxruntime-genai has it.

    pixel_values -> vision -> image_features --+
                              input_ids -------+-> embedding -> inputs_embeds -> decoder -> logits

The decoder is a causal language model that reads embeddings in the place of tokens. Each graph has a task of its own.
"""

from graphopt.tasks.vision_language.decoder import VISION_LANGUAGE as VISION_LANGUAGE
from graphopt.tasks.vision_language.embedding import TOKEN_EMBEDDING as TOKEN_EMBEDDING
from graphopt.tasks.vision_language.vision import VISION_TOWER as VISION_TOWER
