"""Pure functions over tensors and numbers, and `fit`, the one training loop.

Modules:

    losses            negative log-likelihood, KL to the base, GRPO's advantage, the clipped policy gradient by token and by turn
    returns           n-step targets, returns, advantages and the value loss, turn by turn
    certificate       the certificate of a turn's tokens: carried on by the next state or not, and the gap of engine and trainer
    shadow            episodes packed into one row, critic prompts in shadow segments
    tree_layout     which token of a row attends to which, worked out once a row
    tree_flex       the same as a block mask for FlexAttention, an option on a GPU
    tree_attention  the attention in which later tokens do not see a shadow
    value_head        the value of a state, read at the end of its critic prompt
    value_use         what values are good for: variance explained, the best of n episodes, early abort
    credit            what must hold of the credit in a row before the loss: each token learns from its own turn
    ledger            the ledger of credit: every token with its turn, reward, value, advantage and share of the loss
    fit               the one training loop
    checkpoint        where a training stands, on disk: weights, moments, metrics
    batches           token rows padded into tensors; decides which tokens count
    adapter           LoRA adapters on disk and in training
    ema               the target network's step
    priorities        which transitions are drawn next
    statistics        intervals, correlations, calibration, and how much of a target's text leaks
"""
