"""Episodes: played, counted, and read back as transitions.

Modules:

    rollout      many episodes side by side, each at its own pace; sorts failures by whose they are
    forced       episodes that go on from a stored state with a given action
    environment  the task's environment, with the oracle or simulated user that it needs
    agents       how a reply becomes turns: one, or one for each thought of a chain
    jobs         calls in threads while the engine goes on: environments that wait for a server
    tally        episodes counted: metrics, and whether any of them says something
    transitions  between episodes and rows
    chains       which transitions are backed up, each with those that follow it
    drawing      which transitions are drawn, and others in the place of what was dropped
"""
