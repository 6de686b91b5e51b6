"""The network between hosts: its addresses, and how much it carries."""
