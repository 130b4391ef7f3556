"""The critics at work and under test: futures and verdicts, the audit, the gate, values, search by V.

Modules:

    asking    ask a role with the run's config; used by all that follow
    backup    the language Bellman backup: real steps and a sampled future, merged and corrected; used by targets
    critique  k futures of (s, a) and the verdict on them; used by refine, pick and the audit
    rolled    rollouts of an action, or its real outcome, told as futures; used by pick and refine without a successor
    audit     the critic against returns and against the environment's truth
    q_audit   the same for a critic that is a number
    gate      the outcome gate, an option of refine
    values    the values of a self_ac policy on new episodes: how well they tell the return, best of n, early abort
    search    best-first search on game24: the policy proposes, V orders the frontier
    rethink   a new thought before a rewritten action, with what the policy knows
    refinement  what came of a judged action: kept, rewritten or dropped
    q_values  Q(s, a) as a number, read by a head; used by q_critic, by pick and by the audit
    fresh     actions sampled at states of the replay, and the row that the policy learns; used by refine and by pick
"""
