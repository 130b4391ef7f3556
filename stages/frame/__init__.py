"""The definition of a stage, and what all packages share: types, the contract, config sections, reading a reply.

Modules:

    types        the vocabulary as frozen data and Protocols; loads nothing heavy
    contract     what a stage is, what it may see, and its fingerprint
    sections     the config that stages share: task, model, roles
    own          your own modules that a config names, found in the project folder
    border       what an environment hands over, checked: messages, rewards, flags, scenarios
    checked_env  an environment behind that border, and how long it is waited for
    signals      signals that wait for the end of work that must not be interrupted
    loops        event loops in threads of their own, one a name
    react        reads a thought and an action, by words or by tags
"""
