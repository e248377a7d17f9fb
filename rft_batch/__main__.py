"""`python -m rft_batch` is the same command as `rft-batch`."""

from rft_batch.cli import main

if __name__ == "__main__":
    main()
