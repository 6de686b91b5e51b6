"""Commands that change hosts: each runs exactly the pyinfra line that it prints."""
