"""What a run would cost: work, memory and hours, counted from its config before it runs.

Modules:

    estimate  work, memory and hours of a run on a device, and whether it fits
    workload  what a run would do, counted from its config: prompts, tokens, steps
    work      what the work of a stage is made of: requests, and rows of training as trees have them
    storage   what a run keeps, on disk and in the machine's memory
    lengths   what only a run can tell of itself, assumed before it runs
    shapes    shapes of models and data sheets of devices, as far as cost goes
"""
