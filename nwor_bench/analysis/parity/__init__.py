"""Does a mode change the output? Tokens, acceptance, K/V rows and writes against off x off."""
