"""`selastic`: asks the controller or runs a tool, and renders; it never opens the ledger.

Modules of a verb are imported when the verb runs, so that `selastic --help` is fast on any host.
"""
