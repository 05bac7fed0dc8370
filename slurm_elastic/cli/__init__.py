"""`selastic`: one file per group of verbs, thin; talks to the controller, never opens the ledger.

Nothing heavy is imported before a verb needs it: `selastic --help` answers at
once, on any host.
"""
