"""Core of dgx-spark-deploy: settings, plans, facts and operations."""
