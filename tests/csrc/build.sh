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

# Half of the time with AddressSanitizer goes into making the tests themselves fast, which they need not be.
of_tests=""
[ "$variant" = asan ] && of_tests="-O0"

sources=""
for source in "$here"/*.cpp "$core"/io/*.cpp "$core"/memory/*.cpp "$core"/pipeline/*.cpp \
    "$core"/kernels/code_map.cpp "$core"/kernels/elementwise.cpp "$core"/kernels/moments.cpp \
    "$core"/kernels/place_sum.cpp; do
    [ -e "$source" ] && sources="$sources $source"
done

# One object a source, two compilers at a time: sanitized builds are slow.
objects="$output.objects"
rm -rf "$objects"
mkdir -p "$objects"
# shellcheck disable=SC2086
printf '%s\n' $sources | xargs -P 2 -I {} sh -c \
    'case $1 in '"$here"'/*) more="'"$of_tests"'" ;; *) more="" ;; esac
     "${CXX:-g++}" -std=c++17 -Wall -Wextra -Werror '"$flags"' $more -I '"$core"' -c "$1" \
        -o '"$objects"'/$(echo "$1" | tr / _).o' compile {}
# shellcheck disable=SC2086
"${CXX:-g++}" $flags "$objects"/*.o -o "$output" -pthread
rm -rf "$objects"
