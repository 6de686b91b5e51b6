"""The tools on a host: ``spark-host VERB``, with Python 3.10's standard library only."""
