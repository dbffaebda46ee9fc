"""The vocabulary every other room speaks.

Standard library and pydantic only: it passes through the workflow sandbox and must never import a
room of ours, a database library or Temporal.
"""
