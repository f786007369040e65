"""A language model's opinion on incidents: asked for beside everything else, shown, and never acted upon.

`queue` takes what is wanted and posts what came of it; `client` asks a model, each time in a process of its own:
`ask_endpoint` for a server, `local_model` for a model in a folder. `pending` keeps the rules that a model proposed.
"""
