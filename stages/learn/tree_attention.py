"""Attention over a tree: its lines by the plain causal kernel, its branches by a few masked calls.

A token of a line sees its path up to itself. A token of a branch sees the first `prefix` tokens of its line, and its
branch up to itself (stages.learn.tree). For the critic's prompts that is the mask of the Self-AC slides. No (T, T) mask
is made [ours]: with a dense one the lines would lose the causal kernel. It is registered with transformers under
`NAME`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from stages.frame.sections import Attention
from stages.frame.types import UsageError
from stages.learn.adapter import base_of
from stages.learn.tree import Branch, Tree, grow
from stages.learn.tree_flex import FlexLayout, flex_forward
from stages.learn.tree_kernel import layout_for
from stages.learn.tree_layout import Keys, Layout, Row, SideBySide

NAME = "turnwise_tree"


def tree_forward(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, dropout: float = 0.0, scaling: float | None = None,
    tree_layout: Layout | FlexLayout | None = None, sliding_window: int | None = None, **options: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """transformers' interface: query (1, H, T, d), key and value (1, H', T, d), H' dividing H. Returns (1, T, H, d).

    Without a layout it is transformers' own sdpa, so that a switched model still runs plain passes; with that of
    tree_flex.py it is FlexAttention. Gradients flow.
    Raises UsageError where the layer has a sliding window that a line does not fit into.
    """
    if tree_layout is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        options |= {"dropout": dropout, "scaling": scaling, "sliding_window": sliding_window}
        plain: tuple[Tensor, None] = sdpa_attention_forward(module, query, key, value, attention_mask, **options)
        return plain
    if sliding_window is not None and sliding_window < tree_layout.longest:
        raise UsageError(
            f"wanted attention over a whole row of {tree_layout.longest} positions, found a sliding window of {sliding_window}; "
            "use a model without one, or shorter rows"
        )
    if isinstance(tree_layout, FlexLayout):
        return flex_forward(query, key, value, tree_layout, scaling), None
    groups, back = tree_layout.groups, tree_layout.back
    if tree_layout.slots is not None:
        query, key, value = (SideBySide.apply(x, tree_layout) for x in (query, key, value))  # type: ignore[no-untyped-call]
    grouped = query.shape[1] != key.shape[1]
    options = {"dropout_p": dropout, "scale": scaling}
    # Token by token, as the projections leave it: the gradients put together again then need no other order in memory.
    queries = torch.split(query.transpose(1, 2), [tree_layout.n_visible, *(g.end - g.start for g in groups)], 1)
    keys, values = (Keys.apply(x, tree_layout.n_visible, groups) if groups else (x,) for x in (key, value))  # type: ignore[no-untyped-call]
    outs = [
        scaled_dot_product_attention(
            queries[0].transpose(1, 2), keys[0], values[0], is_causal=True, enable_gqa=grouped, **options
        )
    ]
    for group, q, k, v in zip(groups, (q.transpose(1, 2) for q in queries[1:]), keys[1:], values[1:], strict=True):
        if grouped and q.device.type != "cpu":
            # Off the CPU, grouped heads together with a mask would fall back to the kernel that writes out all scores.
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        outs.append(
            scaled_dot_product_attention(
                q, k, v, attn_mask=group.bias(q.dtype), enable_gqa=q.shape[1] != k.shape[1], **options
            )
        )
    outs = [o.transpose(1, 2) for o in outs]
    out = torch.cat(outs, 1) if groups else outs[0]
    return (out if back is None else Row.apply(out, back)), None  # type: ignore[no-untyped-call]


@contextmanager
def tree_attention(model: Any, kernel: Attention = "sdpa") -> Iterator[None]:
    """The model with this attention, put back afterwards. Needed around forward *and* backward only with gradient
    checkpointing, where the backward pass runs the layers again. Raises UsageError for a model whose attention cannot
    be replaced.

    kernel: `model.attention`, for each `body_pass` within. A model that has this attention already keeps its kernel.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(NAME, tree_forward)
    AttentionMaskInterface.register(NAME, sdpa_mask)  # for plain passes; `body_pass` has none built
    base = base_of(model)
    before = base.config._attn_implementation
    if before == NAME:
        yield
        return
    base.set_attn_implementation(NAME)
    if base.config._attn_implementation != NAME:
        raise UsageError(
            f"wanted a model whose attention can be replaced, found {type(base).__name__}; use one that transformers runs by its attention interface"
        )
    base.tree_kernel = kernel
    try:
        yield
    finally:
        del base.tree_kernel
        base.set_attn_implementation(before)


def body_pass(
    model: Any, tree: Tree, *, layout: Layout | FlexLayout | None = None, embeddings_TD: Tensor | None = None
) -> Tensor:
    """Last hidden state of every token of the tree, (T, D): one pass, no vocabulary projection. Gradients flow.

    embeddings_TD: what goes in instead of the ids' embeddings. layout: `layout_of(tree)` or `flex_layout_of(tree)`, in
    place of that which `tree_attention` says. Raises ValueError with gradient checkpointing outside `tree_attention`: the second run of
    the layers would use another attention.
    """
    base = base_of(model)
    body, switched = base.model, base.config._attn_implementation == NAME
    if not switched and torch.is_grad_enabled() and body.training and getattr(body, "is_gradient_checkpointing", False):
        raise ValueError("with gradient checkpointing, put forward and backward inside `with tree_attention(model):`")
    inputs = {"input_ids": tree.ids[None]} if embeddings_TD is None else {"inputs_embeds": embeddings_TD[None]}
    # A 4-D mask is handed on as it is, so this empty one, which `tree_forward` ignores, keeps (T, T) masks from being
    # built.
    no_mask = torch.empty(1, 1, 0, 0, device=tree.ids.device)
    with tree_attention(model):
        states: Tensor = body(
            **inputs, attention_mask=no_mask, position_ids=tree.position_ids[None], use_cache=False,
            tree_layout=layout or layout_for(tree, base.tree_kernel),
        ).last_hidden_state[0]  # fmt: skip
    return states


def check_masks(model: Any, *, length: int = 48) -> None:
    """Raise UsageError, one sentence, for an architecture on which a tree is not what separate passes are.

    Three made-up lines (two begin alike) with branches run as one tree, and row by row with the model's own attention.
    The states of a line must not depend on its branches. Those of a branch depend on its own path only. Largest
    |difference| up to 1e-3 of the largest |state| passes in fp32, 5e-2 in 16 bits; what ignores mask or positions is
    far off. What only long rows, or only training would show is refused by its config field. A sliding window longer
    than `length` shows only when a row outgrows it: then `tree_forward` refuses.
    """
    base = base_of(model)
    for field, value, reason in unfit_fields(base.config.get_text_config()):
        raise UsageError(
            f"model.path: wanted a model whose tree of rows equals separate passes, found {field} = {value!r} in its config: {reason}"
        )
    training = [m for m in model.modules() if m.training]
    model.eval()
    try:
        with torch.no_grad():
            off = largest_difference(model, length)
    except torch.OutOfMemoryError:
        raise
    # whatever an unfit model's code trips over
    except (AttributeError, TypeError, ValueError, KeyError, IndexError, RuntimeError) as error:
        reason = str(error).partition("\n")[0]
        raise UsageError(
            f"wanted a decoder that takes positions and attention by transformers' interface, found {type(base).__name__} ({reason})"
        ) from error
    finally:
        for module in training:
            module.training = True
    allowed = 1e-3 if next(base.parameters()).dtype == torch.float32 else 5e-2
    if not off <= allowed:
        raise UsageError(
            f"a tree of rows must give what separate passes give, {type(base).__name__} is off by {off:.1%} (allowed {allowed:.1%}). The model ignores the mask or the positions, or scales its logits. Use another model"
        )


def unfit_fields(config: Any) -> Iterator[tuple[str, Any, str]]:
    """(field, value, why and what to do) of what a model's config asks for and no tree gives."""
    other = "use another model"
    rope: Mapping[str, Any] = getattr(config, "rope_parameters", None) or {}
    layers = {f".{name}": of for name, of in rope.items() if isinstance(of, Mapping)}  # those of each kind of layer
    for name, parameters in (layers or {"": rope}).items():
        kind = str(parameters.get("rope_type", ""))
        if kind == "longrope" or "dynamic" in kind:
            reason = "the longest position of a pass decides how all of its positions are rotated"
            yield f"rope_parameters{name}.rope_type", kind, f"{reason}; {other}"
    if chunk := getattr(config, "attention_chunk_size", None):
        yield "attention_chunk_size", chunk, f"the mask carries the chunks, and a tree has no mask; {other}"
    for name, value in config.to_dict().items():
        # Those of a classifier's head and of GPT-2's summary are of no use to a language model.
        drops = "dropout" in name or name.endswith(("_pdrop", "layerdrop"))
        if (
            drops
            and not name.startswith(("classifier", "summary", "seq_classif"))
            and isinstance(value, float)
            and value
        ):
            yield name, value, "no two passes in training would give a token one log-prob; set it to 0 in config.json"


def largest_difference(model: Any, length: int) -> float:
    """Tree against separate passes: largest |difference| of states and logits, in shares of the largest |entry|."""
    base = base_of(model)
    vocabulary, device = base.get_input_embeddings().num_embeddings, base.device
    first = made_up(vocabulary, length, 0)
    lines = [first, made_up(vocabulary, length // 2, 5), (*first[: length // 3], *made_up(vocabulary, length // 3, 9))]
    branches = [
        Branch(e, max(1, len(line) * share // 3), made_up(vocabulary, 3 + share, 7))
        for e, line in enumerate(lines)
        for share in (1, 2, 3)
    ]
    tree = grow(lines, branches).to(device)
    states_TD = body_pass(model, tree)

    def alone(ids: Sequence[int]) -> Tensor:
        found: Tensor = base.model(input_ids=torch.tensor([ids], device=device), use_cache=False).last_hidden_state[0]
        return found

    found = torch.cat([states_TD[path[path >= 0]] for path in tree.paths])
    visible = torch.cat([alone(line) for line in lines])
    # The model's own logits: some architectures scale or cap them after the projection, and an engine's log-probs are
    # of those.
    own_logits = torch.cat(
        [base(input_ids=torch.tensor([line], device=device), use_cache=False).logits[0] for line in lines]
    )
    ends = torch.stack([alone((*lines[b.line][: b.prefix], *b.ids))[-1] for b in branches])
    found_ends = states_TD[tree.branch_start + tree.branch_length - 1]
    pairs = [(found, visible), (found_ends, ends), (base.get_output_embeddings()(found), own_logits)]
    return max(float((x - y).abs().max() / y.abs().max()) for x, y in pairs)


def made_up(vocabulary: int, length: int, offset: int) -> tuple[int, ...]:
    """Ids spread over the vocabulary by a fixed rule, so that a check says the same each time."""
    return tuple((offset + 37 * t * t + 11 * t) % vocabulary for t in range(length))
