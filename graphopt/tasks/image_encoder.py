"""Images become states or embeddings, as DINOv2, CLIP's image tower and SAM's encoder make them.

Outputs: ``image_embeds`` [batch, numbers], which is the embedding as the graph makes it; or ``last_hidden_state``
[batch, patches, width] or [batch, width, height, width] and perhaps ``pooler_output``. See
:mod:`graphopt.tasks.signals` for the inputs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from graphopt.analysis.structure.ports import HIDDEN, LOGITS, POOLER_OUTPUT
from graphopt.tasks.base import classes_of
from graphopt.tasks.signals import Signals

if TYPE_CHECKING:
    from collections.abc import Collection

IMAGE_EMBEDS = "image_embeds"

_TOWERS = ("VisionModel", "VisionModelWithProjection", "VisionEncoder")


class SignalEncoder(Signals):
    """Signals become states: the base of encoders of images and of recordings."""

    quantity: ClassVar[str] = "hidden states"
    output: ClassVar[str] = HIDDEN
    extra_outputs: ClassVar[tuple[str, ...]] = (POOLER_OUTPUT,)
    has_classes: ClassVar[bool] = False

    def first_output(self, outputs: Collection[str]) -> str | None:
        """See :class:`Signals`; the embedding, where the graph makes one."""
        names = () if LOGITS in outputs else (IMAGE_EMBEDS, HIDDEN, POOLER_OUTPUT)
        return next((name for name in names if name in outputs), None)

    def compared_outputs(self, outputs: Collection[str]) -> tuple[str, ...]:
        """See :class:`Signals`; beside an embedding no states, whose basis is free then."""
        names = super().compared_outputs(outputs)
        return names[:1] if names[:1] in ((IMAGE_EMBEDS,), (POOLER_OUTPUT,)) else names


class ImageEncoder(SignalEncoder):
    """See the module for the ports."""

    name: ClassVar[str] = "image_encoder"
    noun: ClassVar[str] = "an encoder of images"

    def _classes(self, config: Any, transformers: Any) -> set[str]:
        """Return the bare model, or the image tower, that a configuration names."""
        names = set(getattr(config, "architectures", None) or ())
        auto = transformers.models.auto.modeling_auto
        bare = classes_of(type(config), auto.MODEL_FOR_IMAGE_MAPPING)
        classes = bare | classes_of(type(config), auto.MODEL_MAPPING)
        towers = {name for name in names if name.endswith(_TOWERS) and hasattr(transformers, name)}
        is_tower = hasattr(config, "image_size") and not hasattr(config, "text_config")
        return names & (bare | (towers if is_tower else set()) | {name for name in classes if name.endswith(_TOWERS)})


IMAGE_ENCODER = ImageEncoder()
