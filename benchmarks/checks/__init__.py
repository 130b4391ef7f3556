"""Whether something is right: engines, the plan, a GPU, base models, verifiers, intervals."""
