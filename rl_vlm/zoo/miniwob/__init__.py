"""MiniWoB-v0: small web tasks in Chromium, played by clicks and keys."""
