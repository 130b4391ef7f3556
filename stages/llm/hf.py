"""Engine over transformers: batched sampling with a KV cache, LoRA adapters by name, on CPU or GPU.

For models that fit on one device, and as the reference for other engines' log-probs.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch

from stages.frame.types import Completion, EngineUnavailable, Request, UsageError
from stages.llm import tokens
from stages.llm.folder import GENERATION, check_folder, reading
from stages.llm.sampling import sample
from stages.llm.shared import lend

LARGE = 10_000_000
"""Weights from which on a row that is done costs less than the copy of the KV cache that takes it out."""
DONE = 0.25
"""Share of a batch's rows that are then done before they are taken out. Of a smaller model each goes at once."""
CUT = 2e11
"""Padding, in products of a token and a weight, that a batch may have before it is cut in two. Below it another batch's
steps cost more. A model of a few MB never gets there.
"""
KEPT_ADAPTERS = 4  # the newest ones stay loaded: policy, its predecessor, target, one more


def model_hash(path: str) -> str:
    """sha256 of a model folder's config, tokenizer, weights and JSONL rows; of the name itself where it is a hub name."""
    folder = Path(path)
    digest = hashlib.sha256()
    if not folder.is_dir():
        return hashlib.sha256(path.encode()).hexdigest()
    for file in sorted([*folder.glob("*.safetensors"), *folder.glob("*.json*"), *folder.glob("*.jinja")]):
        digest.update(file.name.encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()


def load_base(path: str, dtype: str) -> tuple[Any, Any]:
    """(model in eval mode on the best device, tokenizer), read from disk. Raises UsageError if the folder holds none."""
    model, tokenizer = read_base(path, dtype)
    return model.to(best_device()), tokenizer


def shared_base(path: str, dtype: str) -> Any:
    """The same model over weights that stay in memory for the next one that asks: nobody may write to them."""
    return lend(path, dtype, lambda: read_base(path, dtype)[0]).to(best_device())


def best_device() -> str:
    """Where a model works: "cuda" if torch sees a card, else "cpu"."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def read_base(path: str, dtype: str) -> tuple[Any, Any]:
    """As `load_base`, in the machine's own memory. dtype "auto": the one that it was saved in."""
    check_folder(path)
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # a bar for every load of a few MB, terminal or not
    with reading(path, "config.json"):
        AutoConfig.from_pretrained(path)
    tokenizer = tokens.load_tokenizer(path)
    if (Path(path) / GENERATION).exists():
        with reading(path, GENERATION):
            GenerationConfig.from_pretrained(path)
    wanted = dtype if dtype == "auto" else getattr(torch, dtype)
    with reading(path, "config.json", "the weights"):  # which do not fit each other, or numbers that make no model
        model, told = AutoModelForCausalLM.from_pretrained(path, dtype=wanted, output_loading_info=True)
    _check_whole(path, told)
    return model.eval(), tokenizer


def _check_whole(path: str, told: Mapping[str, Collection[str]]) -> None:
    """Raises UsageError where weights and config.json differ, which transformers would fill at random, or drop."""
    for kind, what in (
        ("missing_keys", "is missing in"),
        ("unexpected_keys", "has no place in the model, and stands in"),
    ):
        if names := sorted(told[kind]):
            more = f" ({len(names) - 1} more)" if len(names) > 1 else ""
            raise UsageError(
                f"model.path: {names[0]} {what} the weights at {path!r}{more}; give a folder whose weights and config.json belong together"
            )


class HfEngine(tokens.ChatTokenizer):
    """`Engine` over one base model and its adapters."""

    def __init__(self, path: str, *, dtype: str = "float32", batch: int = 256) -> None:
        super().__init__(path)
        self.model_hash = model_hash(path)
        self._base = shared_base(path, dtype)
        self._peft: Any = None
        self._loaded: dict[str, Path] = {}
        self._batch = batch
        self._n_weights = sum(weight.numel() for weight in self._base.parameters())
        self._stops = tokens.stop_tokens(self.tokenizer, self._base.generation_config.eos_token_id)
        self.context: int | None = getattr(self._base.config, "max_position_embeddings", None)
        # Any token serves as padding: it stands to the left, masked.
        self._pad_id = self.tokenizer.pad_token_id or 0

    def load_adapter(self, name: str, path: Path) -> None:
        if self._loaded.get(name) == path:
            # the newest again: what a stage asks for must outlive what it asks for next
            self._loaded[name] = self._loaded.pop(name)
            return
        check_adapter(path, self.model_hash)
        from peft import PeftModel

        if self._peft is None:
            self._peft = PeftModel.from_pretrained(self._base, path, adapter_name=name)
        else:
            if name in self._loaded:
                self._peft.delete_adapter(name)
            self._peft.load_adapter(path, adapter_name=name)
        self._peft.eval()
        self._loaded.pop(name, None)
        self._loaded[name] = path
        for old in list(self._loaded)[:-KEPT_ADAPTERS]:
            self._peft.delete_adapter(old)
            del self._loaded[old]

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """One completion a request, in order; in batches of like length, by adapter. A shared prompt is read once."""
        tokens.check_loaded(requests, self._loaded)
        known = self._base.get_input_embeddings().num_embeddings
        if (largest := max((max(r.prompt_ids, default=0) for r in requests), default=0)) >= known:
            raise UsageError(
                f"model.path: the tokenizer at {self._path!r} gives the token id {largest}, the model has {known}. Download tokenizer.json again from the model's source"
            )
        requests = tokens.fit_context(requests, self.context)
        done: dict[int, Completion] = {}
        order = sorted(
            range(len(requests)),
            key=lambda i: (requests[i].adapter or "", len(requests[i].prompt_ids), requests[i].prompt_ids, i),
        )
        for name, group in groupby(order, key=lambda i: requests[i].adapter):
            indices = list(group)
            with self._with_adapter(name) as model:
                for start in range(0, len(indices), self._batch):
                    batch = indices[start : start + self._batch]
                    for part in parts_of([len(requests[i].prompt_ids) for i in batch], self._n_weights):
                        chunk = [batch[i] for i in part]
                        done.update(zip(chunk, self._decode_batch(model, [requests[i] for i in chunk]), strict=True))
        return [done[i] for i in range(len(requests))]

    @contextmanager
    def _with_adapter(self, name: str | None) -> Iterator[Any]:
        """The base model with one adapter (or none) switched on."""
        if self._peft is None:
            yield self._base
        elif name is None:
            with self._peft.disable_adapter():
                yield self._peft
        else:
            self._peft.set_adapter(name)
            yield self._peft

    @torch.inference_mode()
    def _decode_batch(self, model: Any, requests: Sequence[Request]) -> list[Completion]:
        """Each step reads the device once. A row that is done stays, its tokens ignored, until enough of them are."""
        device, limit = model.device, max(r.max_tokens for r in requests)
        of_prompt: dict[Sequence[int], int] = {}
        asked = torch.tensor([of_prompt.setdefault(r.prompt_ids, len(of_prompt)) for r in requests], device=device)
        longest = max(map(len, of_prompt))
        ids = torch.tensor([[self._pad_id] * (longest - len(p)) + list(p) for p in of_prompt], device=device)
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in of_prompt], device=device)
        uniforms_BT = torch.tensor(
            np.stack([np.random.Generator(np.random.Philox(r.seed)).random(limit) for r in requests]), device=device
        )
        temperature = torch.tensor([[r.temperature] for r in requests], device=device)
        is_greedy = not any(r.temperature > 0 for r in requests)
        limits = torch.tensor([r.max_tokens for r in requests], device=device)
        stops = torch.tensor(self._stops, device=device)
        made: list[list[tuple[int, float]]] = [[] for _ in requests]
        rows, position, cache, step_ids = (
            torch.arange(len(requests), device=device),
            (mask.cumsum(1) - 1).clamp(min=0),
            None,
            ids,
        )
        alive, going = torch.ones_like(rows, dtype=torch.bool), list(enumerate(made))
        for t in range(limit):
            out = model(
                input_ids=step_ids, attention_mask=mask, position_ids=position, past_key_values=cache, use_cache=True,
                logits_to_keep=1,
            )  # fmt: skip
            cache, logits_BV = out.past_key_values, out.logits[:, -1].float()
            if t == 0 and len(of_prompt) < len(requests):  # each prompt was read once; from here on a row a request
                logits_BV, mask = logits_BV[asked], mask[asked]
                cache.batch_select_indices(asked)
            chosen = logits_BV.argmax(1) if is_greedy else sample(logits_BV, temperature[rows], uniforms_BT[rows, t])
            log_probs = logits_BV.log_softmax(1).gather(1, chosen[:, None])[:, 0]
            alive = alive & ~torch.isin(chosen, stops) & (limits[rows] > t + 1)
            said, told, goes_on = torch.stack([chosen.double(), log_probs.double(), alive.double()]).tolist()
            for i, row in going:
                row.append((int(said[i]), told[i]))
            going = [(i, row) for i, row in going if goes_on[i]]
            if not going:
                break
            if len(goes_on) - len(going) > (DONE if self._n_weights >= LARGE else 0) * len(goes_on):
                keep = alive.nonzero()[:, 0]
                rows, chosen, mask, alive = rows[keep], chosen[keep], mask[keep], alive[keep]
                cache.batch_select_indices(keep)
                going = [(i, row) for i, (_, row) in enumerate(going)]
            # A row that is done goes no further: its position stays within what the model knows.
            mask = torch.cat([mask, alive[:, None].to(mask.dtype)], 1)
            position, step_ids = mask.sum(1, keepdim=True) - 1, chosen[:, None]
        return list(self._completions(made))

    def _completions(self, made: Sequence[Sequence[tuple[int, float]]]) -> Iterator[Completion]:
        for row in made:
            ids, lps = zip(*row, strict=True)
            if not np.isfinite(lps).all():
                raise EngineUnavailable(
                    "the model produced log-probs that are not finite; its weights or adapter are broken"
                )
            stopped = ids[-1] in self._stops
            yield Completion(
                self.decode(ids[:-1] if stopped else ids), tuple(ids), tuple(lps), "stop" if stopped else "length"
            )


def parts_of(lengths: Sequence[int], weights: int) -> list[range]:
    """Batches of a batch: cut where its padding would cost more than `CUT` products of a token and a weight.

    lengths: of the prompts, ascending; all of a part are padded to its longest. weights: of the model. Ours.
    """
    n = len(lengths)
    saved, at = max(((i * (lengths[-1] - lengths[i - 1]), i) for i in range(1, n)), default=(0, 0))
    if saved * weights <= CUT:
        return [range(n)]
    return [
        *parts_of(lengths[:at], weights),
        *(range(at + part.start, at + part.stop) for part in parts_of(lengths[at:], weights)),
    ]


def check_adapter(path: Path, base_hash: str) -> None:
    """Raises UsageError where the folder holds no adapter, or one that was trained on another base model."""
    if not (path / "adapter_config.json").is_file() or not (path / "adapter_model.safetensors").is_file():
        raise UsageError(
            f"wanted a LoRA adapter (adapter_config.json, adapter_model.safetensors), found none in the folder {path.name!r}"
        )
    note = path / "base.json"
    found = json.loads(note.read_text())["model_hash"] if note.is_file() else None
    if found is not None and found != base_hash:
        raise UsageError(
            f"the adapter belongs to base model {found[:12]}, the run uses {base_hash[:12]}; set model.path to the adapter's own base"
        )


def merge_adapter(base: str, adapter: Path, folder: Path) -> None:
    """Save the base model with the adapter added to its weights, as AutoModelForCausalLM and AutoTokenizer load it."""
    from peft import PeftModel

    weights, tokenizer = read_base(base, "auto")
    model: Any = PeftModel.from_pretrained(weights, str(adapter))
    model.merge_and_unload().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
