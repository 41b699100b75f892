"""Parity with off x off: tokens, acceptance, K/V rows and writes."""
