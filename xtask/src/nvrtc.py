"""Compiles CUDA sources to PTX with NVRTC. Arguments: a folder that holds NVRTC, then pairs of source and output."""

import ctypes
import pathlib
import sys

OPTIONS = [b"--gpu-architecture=compute_70", b"--include-path=crates/warpipe/include"]


def load(folder):
    found = sorted(pathlib.Path(folder).rglob("libnvrtc.so.12"))
    if not found:
        sys.exit(f"no libnvrtc.so.12 under {folder}")
    # Opens the library that libnvrtc loads by its bare name, so that no search path has to name the folder.
    for builtins in found[0].parent.glob("libnvrtc-builtins.so.*"):
        ctypes.CDLL(str(builtins), mode=ctypes.RTLD_GLOBAL)
    return ctypes.CDLL(str(found[0]))


def text(nvrtc, program, what):
    size = ctypes.c_size_t()
    getattr(nvrtc, f"nvrtcGet{what}Size")(program, ctypes.byref(size))
    buffer = ctypes.create_string_buffer(size.value)
    getattr(nvrtc, f"nvrtcGet{what}")(program, buffer)
    return buffer.raw.rstrip(b"\0")


def compile_file(nvrtc, source, output):
    program = ctypes.c_void_p()
    code = pathlib.Path(source).read_bytes()
    name = pathlib.Path(source).name.encode()
    if nvrtc.nvrtcCreateProgram(ctypes.byref(program), code, name, 0, None, None) != 0:
        sys.exit(f"{source}: nvrtcCreateProgram failed")
    options = (ctypes.c_char_p * len(OPTIONS))(*OPTIONS)
    if nvrtc.nvrtcCompileProgram(program, len(OPTIONS), options) != 0:
        sys.exit(f"{source} does not compile:\n{text(nvrtc, program, 'ProgramLog').decode()}")
    pathlib.Path(output).write_bytes(text(nvrtc, program, "PTX"))


def main(folder, *files):
    nvrtc = load(folder)
    for source, output in zip(files[::2], files[1::2]):
        compile_file(nvrtc, source, output)


if __name__ == "__main__":
    main(*sys.argv[1:])
