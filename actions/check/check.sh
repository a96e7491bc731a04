#!/usr/bin/env bash
# The kernel of the commit $BASE against that of the working tree, by `autokernel check`; what action.yml runs.
set -euo pipefail

file=${KERNEL_FILE%:*}                      # FILE or FILE:FUNCTION
function=${KERNEL_FILE#"$file"}
old=$(mktemp -d)/old.py
git cat-file -e "$BASE" 2> /dev/null || git fetch --quiet --depth=1 origin "$BASE"
if ! git cat-file -e "$BASE:./$file" 2> /dev/null; then
    echo "$file is new: nothing to compare it with"
    exec autokernel bench "$KERNEL_FILE" --kernel "$KERNEL_TYPE"
fi
git show "$BASE:./$file" > "$old"
# shellcheck disable=SC2086  # several words
autokernel check "$old$function" "$KERNEL_FILE" --kernel "$KERNEL_TYPE" --junit "$JUNIT" $ARGUMENTS
