"""Engine over vLLM in this process: continuous batching, a prefix cache, adapters and the base in one batch.

    turnwise run demo --set model.engine=vllm          (pip install 'turnwise[vllm]')

Token ids go in and come out, so vLLM runs without a tokenizer. Log-probs are raw, of temperature 1. On a GPU the engine
gives its memory back (`sleep`) while a stage trains, and takes it again at the next request. Other rows of a batch can
change the rounding. A greedy reply may then change where two tokens tie, a sampled one where a draw falls between two.
"""

from __future__ import annotations

import gc
import math
import os
from collections.abc import Collection, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import torch

from stages.frame.signals import signals_held
from stages.frame.types import Completion, EngineUnavailable, More, Replies, Request, UsageError
from stages.llm.folder import GENERATION, reading
from stages.llm.hf import KEPT_ADAPTERS, check_adapter, model_hash
from stages.llm.streams import in_order
from stages.llm.tokens import ChatTokenizer, check_loaded, fit_context, stop_tokens

# that vLLM has kernels for; an adapter of a rank between them takes the room of the next
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)


class VllmEngine(ChatTokenizer):
    """`Engine` over a base model and its adapters. lora_rank: the largest. gpu_memory: share, weights included."""

    def __init__(self, path: str, *, dtype: str = "float32", lora_rank: int = 32, gpu_memory: float = 0.85) -> None:
        super().__init__(path)
        self.model_hash = model_hash(path)
        self._stops = stop_tokens(self.tokenizer, _generation_eos(path))
        self._llm = start(path, dtype=dtype, lora_rank=lora_rank, gpu_memory=gpu_memory)
        self.context: int | None = int(self._llm.model_config.max_model_len)
        self._loaded: dict[str, tuple[Path, Any]] = {}  # adapter -> its folder, and vLLM's request for it
        self._numbers = count(1)
        self._asleep = False
        self._ended: dict[str, Any] = {}  # outputs by vLLM's name of a request, until their stream fetches them
        self._broken = ""  # how a step failed: what it left half done would come back as wrong tokens

    def load_adapter(self, name: str, path: Path) -> None:
        """Without a restart. Of a name that comes from another folder nothing old is in the prefix cache."""
        if name in self._loaded and self._loaded[name][0] == path:
            self._loaded[name] = self._loaded.pop(name)  # the newest again
            return
        check_adapter(path, self.model_hash)
        from vllm.lora.request import LoRARequest

        number = next(self._numbers)
        # vLLM's prefix cache knows an adapter by name and folder; a name that is never given twice is safe whatever is
        # written to a folder later.
        request = LoRARequest(f"{number}-{name}", number, str(path.resolve()))
        self._wake()
        for old in [name] if name in self._loaded else list(self._loaded)[: 1 - KEPT_ADAPTERS]:
            self._llm.llm_engine.remove_lora(self._loaded.pop(old)[1].lora_int_id)
        try:
            self._llm.llm_engine.add_lora(request)
        except (ValueError, RuntimeError) as error:
            raise UsageError(
                f"vLLM cannot load the adapter in the folder {path.name!r} ({str(error).splitlines()[0]})"
            ) from error
        self._loaded[name] = (path, request)

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """One completion a request, in order, of any adapters at once. After Ctrl-C the engine can be used on."""
        return in_order(self, requests)

    def stream(self, more: More) -> Replies:
        """Completions as they end; what `more` gives joins the batch at the next step. Ctrl-C as in `generate`."""
        under_way: dict[str, tuple[int, Request]] = {}  # by vLLM's name of a request
        try:
            while (asked := more("none" if under_way else "some")) is not None:
                # Only here: what acts on the replies may take long, and is stopped at once.
                with signals_held() as deliver:
                    for (number, _), request in zip(asked, self._checked([r for _, r in asked]), strict=True):
                        name = f"turnwise-{next(self._numbers)}"
                        under_way[name] = number, request
                        self._add(name, request)
                        deliver()
                    ended = [(*under_way.pop(name), output) for name, output in self._step(under_way).items()]
                if ended:
                    yield [(number, self._completion(request, output)) for number, request, output in ended]
        finally:
            with signals_held():
                for name in under_way:
                    self._ended.pop(name, None)
                if under_way and not self._broken:
                    self._llm.llm_engine.abort_request(list(under_way))

    def _checked(self, requests: Sequence[Request]) -> list[Request]:
        """The requests, cut to the model's context, with the engine awake."""
        check_loaded(requests, self._loaded)
        if self._broken:
            raise EngineUnavailable(self._broken)
        checked = fit_context(requests, self.context)
        if checked:
            self._wake()
        return checked

    def sleep(self) -> None:
        """Give the GPU's memory back until the next call: weights wait in the machine's memory. Nothing on a CPU.

        Raises RuntimeError in the middle of a stream, whose requests would go on from a cache that is gone.
        """
        if self._llm.llm_engine.has_unfinished_requests():
            raise RuntimeError("vLLM cannot sleep while requests are under way")
        if torch.cuda.is_available() and not self._asleep:
            self._llm.sleep(level=1)
            self._asleep = True

    def _wake(self) -> None:
        if self._asleep:
            gc.collect()
            torch.cuda.empty_cache()  # what a training left in torch's own pool is memory that vLLM does not get
            self._llm.wake_up()
            self._asleep = False

    def _add(self, name: str, request: Request) -> None:
        adapter = self._loaded[request.adapter][1] if request.adapter is not None else None
        try:
            self._llm.llm_engine.add_request(
                name, {"prompt_token_ids": list(request.prompt_ids)}, self._sampling(request), lora_request=adapter
            )
        except ValueError as error:  # a temperature above 2, say
            raise UsageError(f"vLLM refuses a request ({str(error).splitlines()[0]})") from error

    def _step(self, names: Collection[str]) -> dict[str, Any]:
        """One step of all that is under way: what has ended of these. Of a stream around this one, it is kept."""
        try:
            if self._llm.llm_engine.has_unfinished_requests():
                self._ended.update((output.request_id, output) for output in self._llm.llm_engine.step())
        except Exception as error:  # whatever a kernel or a device raises: this engine is not used again
            said = (str(error).splitlines() or [type(error).__name__])[0]
            self._broken = (
                f"vLLM failed in the middle of a step ({said}) and cannot go on from there; run the same command again"
            )
            raise EngineUnavailable(self._broken) from error
        return {name: self._ended.pop(name) for name in list(self._ended) if name in names}

    def _sampling(self, request: Request) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        # The whole distribution: a model's own top_p or penalty would draw from another one than the log-probs are of.
        return SamplingParams(
            temperature=request.temperature,
            top_p=1.0,
            top_k=0,
            seed=request.seed,
            max_tokens=request.max_tokens,
            stop_token_ids=list(self._stops),
            logprobs=0,  # of the chosen token alone
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

    def _completion(self, request: Request, reply: Any) -> Completion:
        (output,) = reply.outputs
        ids, log_probs = tuple(output.token_ids), tuple(map(float, output.logprobs.logprobs))
        if not ids or output.finish_reason not in ("stop", "length"):
            raise EngineUnavailable(
                f"vLLM ended a reply of {len(ids)} tokens with {output.finish_reason!r}, which is neither 'stop' nor 'length'"
            )
        if ids != tuple(output.logprobs.token_ids):
            raise EngineUnavailable("vLLM gave log-probs of other tokens than it produced")
        if not all(map(math.isfinite, log_probs)):
            raise EngineUnavailable(
                "the model produced log-probs that are not finite; its weights or adapter are broken"
            )
        stopped = ids[-1] in self._stops
        text, reason = self.decode(ids[:-1] if stopped else ids), "stop" if stopped else "length"
        return Completion(text, ids, log_probs, reason, reply.num_cached_tokens)


def start(path: str, *, dtype: str, lora_rank: int, gpu_memory: float) -> Any:
    """A `vllm.LLM`. Raises UsageError where vLLM is missing, or refuses the model or its share of the memory."""
    # In a process of its own the engine would get a terminal's Ctrl-C, too, and end.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # it logs by the page, among our own progress
    try:
        from vllm import LLM
    except ImportError:
        raise UsageError("model.engine = vllm needs the package vllm. Run: pip install 'turnwise[vllm]'") from None
    rank = next((each for each in RANKS if each >= lora_rank), None)
    if rank is None:
        raise UsageError(
            f"model.lora_rank: vLLM takes adapters up to rank {RANKS[-1]}, found {lora_rank}; lower it, or set model.engine to hf"
        )
    gpu = torch.cuda.is_available()
    try:
        return LLM(
            path,
            dtype=dtype,
            skip_tokenizer_init=True,
            generation_config="vllm",  # none: what a request does not say is not taken from the model's folder
            logprobs_mode="raw_logprobs",
            enable_prefix_caching=True,
            enable_lora=True,
            # On a CPU, vLLM 0.32 gives rows without an adapter, in a batch with others, that of the last slot: one that
            # stays empty.
            max_loras=KEPT_ADAPTERS + (not gpu),
            max_lora_rank=rank,
            gpu_memory_utilization=gpu_memory,
            enable_sleep_mode=gpu,
            enforce_eager=not gpu,  # compiling takes minutes on a CPU
            enable_chunked_prefill=gpu,  # on a CPU, vLLM 0.32 fails on a chunk of a prompt whose request has a seed
            seed=0,
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise UsageError(
            f"model: vLLM cannot start on {path!r} with model.gpu_memory = {gpu_memory:g} ({str(error).splitlines()[0]})"
        ) from error


def _generation_eos(path: str) -> int | list[int] | None:
    from transformers import GenerationConfig

    with reading(path, GENERATION):
        try:
            found: int | list[int] | None = GenerationConfig.from_pretrained(path).eos_token_id
        except OSError:  # a folder without one: the tokenizer's end token is all there is
            return None
    return found
