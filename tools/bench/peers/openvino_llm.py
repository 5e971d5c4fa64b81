"""Make OpenVINO's form of a checkpoint: int4 in groups of 128, the last matrix too, for `tools/bench/models.py`.

    python tools/bench/peers/openvino_llm.py CHECKPOINT OUTPUT

It runs in an environment of its own, since optimum-intel wants an older transformers:

    pip install optimum-intel nncf openvino
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path


def main(checkpoint: Path, output: Path) -> None:
    """Export with caches, round weights as OpenVINO does, and write the folder that openvino-genai opens."""
    import nncf
    import openvino
    from optimum.exporters.openvino import main_export

    float_folder = output.with_name(output.name + "-float16")
    main_export(str(checkpoint), str(float_folder), task="text-generation-with-past", convert_tokenizer=False)
    model = openvino.Core().read_model(float_folder / "openvino_model.xml")
    mode = nncf.CompressWeightsMode.INT4_SYM
    int4_model = nncf.compress_weights(model, mode=mode, group_size=128, ratio=1.0, all_layers=True)
    output.mkdir(parents=True)
    openvino.save_model(int4_model, output / "openvino_model.xml")
    for file in float_folder.glob("*.json"):
        shutil.copy(file, output)
    del model, int4_model
    shutil.rmtree(float_folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
