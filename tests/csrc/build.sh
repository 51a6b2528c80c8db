#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Builds the standalone test program of the C++ core:  build.sh VARIANT OUTPUT
# VARIANT is plain, asan (AddressSanitizer and UndefinedBehaviorSanitizer) or tsan (ThreadSanitizer).
set -eu

variant=$1
output=$2
here=$(cd "$(dirname "$0")" && pwd)
core=$(cd "$here/../../ds_fuyou/csrc" && pwd)

# The sanitized programs run without OpenMP: its run-time library is not instrumented, and
# ThreadSanitizer would report races in it that are none.
serial="-Wno-unknown-pragmas -Wno-unused-parameter"
case $variant in
    plain) flags="-O2 -fopenmp" ;;
    asan) flags="-O1 -g1 -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=all $serial" ;;
    tsan) flags="-O1 -g1 -fsanitize=thread $serial" ;;
    *)
        echo "VARIANT must be plain, asan or tsan; got '$variant'" >&2
        exit 2
        ;;
esac

# Half of the time goes into making the tests themselves fast, which they need not be; but each of their accesses calls
# ThreadSanitizer.
of_tests="-O0"
[ "$variant" = tsan ] && of_tests="-O1"

# Two sources that include all others, so that headers are read twice, and two compilers.
objects="$output.objects"
rm -rf "$objects"
mkdir -p "$objects"
printf '#include "%s"\n' "$here"/*.cpp >"$objects/tests.cpp"
printf '#include "%s"\n' "$core"/io/*.cpp "$core"/memory/*.cpp "$core"/pipeline/*.cpp \
    "$core"/kernels/code_map.cpp "$core"/kernels/elementwise.cpp "$core"/kernels/moments.cpp \
    "$core"/kernels/place_sum.cpp >"$objects/core.cpp"
# shellcheck disable=SC2086
printf '%s\n' "tests $of_tests" core | xargs -P 2 -L 1 sh -c \
    'unit=$1 && shift && "${CXX:-g++}" -std=c++17 -Wall -Wextra -Werror '"$flags"' "$@" -I '"$core"' \
        -c '"$objects"'/$unit.cpp -o '"$objects"'/$unit.o' compile
# shellcheck disable=SC2086
"${CXX:-g++}" $flags "$objects"/*.o -o "$output" -pthread
rm -rf "$objects"
