"""The command line's arguments, command by command. `turnwise/cli.py` builds the parser of them.

Modules:

    running  the commands that run something: run, plan, rerun, explain, study, claims, pretrain
    looking  the commands that show runs or keep them in order: stages, presets, compare, runs, show, view, lineage, sql, export, data, gc, verify
    serving  ui, serve, init
    command  what every command has, and the options that several have
"""
