"""How other programs run what is written here. Importing these imports none of them."""
