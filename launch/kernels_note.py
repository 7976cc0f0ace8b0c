"""Says in one line which kernels a server will use on this machine."""

import fastserve_kernels


def main() -> None:
    try:
        library = fastserve_kernels.library.open_library()
        print(f"- C++ kernels: {library.isa}")
    except fastserve_kernels.KernelsUnavailableError as error:
        print(f"- no C++ kernels, the slower torch ones do it: {error}")


if __name__ == "__main__":
    main()
