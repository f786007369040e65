"""A language model's opinion on incidents: asked for beside everything else, shown, and never acted upon.

`inquirer` takes what is wanted and posts what came of it; `endpoint` and `local` ask a model; `local_model` is the
program that runs one, in the training environment; `pending` keeps the rules that a model proposed.
"""
