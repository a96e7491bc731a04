"""`python3 -m autokernel.preflight`: whether AutoKernel can be installed and run here, before anything is downloaded."""

from autokernel.common.preflight import Refused, fail, main

if __name__ == "__main__":
    try:
        main()
    except Refused as refused:
        fail(refused)
