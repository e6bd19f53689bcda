#!/usr/bin/env bash
# Builds the examples where CMake is missing: with $CXX (c++), nvcc if it is there, and the LibTorch of
# python3's PyTorch if that is.
#
#   build.sh PREFIX OUT    PREFIX: warpipe's install tree (cargo xtask c-dist); OUT: for the programs
#
# Says which program it leaves out, and why.
set -eu
here="$(cd "$(dirname "$0")" && pwd)"
prefix="$(cd "${1:?the install tree of warpipe}" && pwd)"
mkdir -p "${2:?a folder for the programs}"
out="$(cd "$2" && pwd)"

cxx="${CXX:-c++} -std=c++17 -O2 -Wall -Wextra -Werror -I$prefix/include"
link="-L$prefix/lib -lwarpipe -Wl,-rpath,$prefix/lib"
nvcc="$(command -v nvcc || ls /usr/local/cuda/bin/nvcc 2>/dev/null || true)"

if [ -n "$nvcc" ]; then
    # For the GPU that is here. For one that this nvcc does not know: PTX, which the driver compiles.
    "$nvcc" -std=c++17 -O2 -arch=native -c "$here/pattern.cu" -o "$out/kernels.o" ||
        "$nvcc" -std=c++17 -O2 -c "$here/pattern.cu" -o "$out/kernels.o"
else
    echo "no nvcc: producer_consumer and opencv_free_camera run on the host device alone"
fi
for name in producer_consumer opencv_free_camera; do
    if [ -n "$nvcc" ]; then
        "$nvcc" -std=c++17 -O2 -Xcompiler -Wall,-Wextra,-Werror -DHAVE_KERNELS "-I$prefix/include" \
            "$here/$name.cpp" "$here/pattern.cpp" "$out/kernels.o" "-L$prefix/lib" -lwarpipe \
            -Xlinker -rpath -Xlinker "$prefix/lib" -o "$out/$name"
    else
        # shellcheck disable=SC2086 # words, to be split
        $cxx "$here/$name.cpp" "$here/pattern.cpp" $link -o "$out/$name"
    fi
done
# shellcheck disable=SC2086 # as above
$cxx "$here/work_queue.cpp" $link -o "$out/work_queue"

# The flags of LibTorch, one on each line.
flags_of_torch='
import os, torch
root = os.path.dirname(torch.__file__)
libraries = os.path.join(root, "lib")
print("-isystem" + os.path.join(root, "include"))
print(f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}")
print("-L" + libraries)
print("-Wl,-rpath," + libraries)
# Those of CUDA register themselves when they are loaded, so they stay though no symbol of theirs is used.
print("-Wl,--no-as-needed")
for name in ("torch_cuda", "c10_cuda", "torch", "torch_cpu", "c10"):
    if os.path.exists(os.path.join(libraries, f"lib{name}.so")):
        print("-l" + name)
'
if ! python3 -c 'import torch' 2>/dev/null; then
    echo "no PyTorch in python3: libtorch_pipes is left out"
    exit
fi
flags="$(python3 -c "$flags_of_torch")"
# shellcheck disable=SC2086 # as above
$cxx "$here/libtorch_pipes.cpp" $flags $link -o "$out/libtorch_pipes"
