"""What a tree must hold and whether it does: exact sets, receipts, hashes."""
