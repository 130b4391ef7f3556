"""Pure functions over tensors and numbers, and `fit`, the one training loop.

Modules:

    losses            negative log-likelihood, KL to the base, GRPO's advantage, the clipped policy gradient by token and by turn
    returns           n-step targets, returns, advantages and the value loss, turn by turn
    certificate       the certificate of a turn's tokens: carried on by the next state or not, and the gap of engine and trainer
    tree              rows that begin alike, as one row of tokens: lines, and branches that nobody else sees
    tree_attention    the attention over a tree, and which models are no fit for it
    tree_layout       where the tokens of a tree go for attention, worked out once a tree
    tree_flex         the same as a block mask for FlexAttention, an option on a GPU
    tree_kernel       which of the two a row takes, by a small measured table
    fused_lora        LoRA of a linear layer as one function, in place of peft's path in training
    kernels           by which kernels a model in training runs: transformers' and peft's, or fused ones
    episode_row       episodes of Self-AC as a tree: a line each, a branch for the critic's prompt after every state
    value_head        the value of a state, read at the end of its critic prompt
    value_use         what values are good for: variance explained, the best of n episodes, early abort
    credit            what must hold of the credit in a row before the loss: each token learns from its own turn
    ledger            the ledger of credit: every token with its turn, reward, value, advantage and share of the loss
    fit               the one training loop
    checkpoint        where a training stands, on disk: weights, moments, metrics
    adapter           LoRA adapters on disk and in training
    ema               the target network's step
    priorities        which transitions are drawn next
    statistics        intervals, correlations, calibration, and how much of a target's text leaks
"""
