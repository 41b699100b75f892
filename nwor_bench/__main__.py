"""`python -m nwor_bench` is `nwor-bench`."""

from nwor_bench.cli.app import main

if __name__ == "__main__":
    main()
