# Nobody has typed anything yet: the host came out of its box.
:
