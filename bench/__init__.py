"""bench: what each choice costs. One file an experiment, one runner, one report."""
