"""`python -m rl_vlm.cli`."""

from rl_vlm.cli.app import main

if __name__ == "__main__":
    main()
