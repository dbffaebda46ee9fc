"""Alembic migrations, in the package and in the wheel; run by `stores/migrate.py` only."""
