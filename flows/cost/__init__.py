"""What a run would cost: work, memory and hours, counted from its config before it runs.

Modules:

    estimate  work, memory and hours of a run on a device
    machine   the model's shape, config, device and rates that the work is done with
    memory    memory on the devices, and whether a run fits
    rates     what turns work into hours, measured on a card or assumed
    workload  prompts, tokens and steps of a run, counted from its config
    work      the parts of a stage's work: requests, and rows of training in trees
    storage   disk and memory that a run needs
    lengths   assumptions about quantities that only a run can tell
    shapes    shapes of models and data sheets of devices
"""
