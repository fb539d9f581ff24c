#!/usr/bin/env bash
# Writes the comment of a pull request: each changed .sched file with its drawing, and the difference to its former order.
#
#     comment.sh BASE PATH...
set -euo pipefail
base=$1
shift
before=$(mktemp -d)
trap 'rm -rf "$before"' EXIT

# A block of code with what a command prints; nothing where the command fails: the check says why.
block() {
  local text
  text=$("${@:2}" 2> /dev/null) || [ "$1" = findings ] || return 0
  [ -z "$text" ] || printf '```\n%s\n```\n\n' "$text"
}

git diff -z --name-only --diff-filter=d "$base" -- "$@" | while IFS= read -r -d '' file; do
  [[ $file == *.sched ]] || continue
  printf '### `%s`\n\n' "$file"
  block drawing schedc show "$file" --format term
  if git show "$base:$file" > "$before/before.sched" 2> /dev/null; then
    block findings schedc diff "$before/before.sched" "$file"
  fi
done
