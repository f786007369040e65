"""The agent, the controller, the command line: the shell around `diagnosis` and `recovery`.

A docstring only, for ever: supervisord owns an import package of this name as well (docs/adr/0004).
"""
