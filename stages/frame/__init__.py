"""What a stage is, and the words that every room shares: types, the contract, sections of config, how a reply is read.

Modules:

    types        the vocabulary as frozen data and Protocols; loads nothing heavy
    contract     what a stage is, what it may see, and its fingerprint
    sections     the config that stages share: task, model, roles
    own          modules of one's own that a config names, found in the project folder
    border       what an environment hands over, checked: messages, rewards, flags, scenarios
    checked_env  an environment behind that border, and how long it is waited for
    signals      those that wait for the end of what must not be broken off
    loops        event loops in threads of their own, one a name
    react        reads a thought and an action, by words or by tags
"""
