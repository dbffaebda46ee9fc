"""Everything that touches the world: models, tools behind the gate, the ledger.

Imports contracts, agents and stores; workflows know it only by `contracts/calls.py`.
"""
