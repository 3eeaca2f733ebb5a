#!/usr/bin/env bash
# nsys around a program that uses the engine, and the reports worth reading of what it recorded.
#
#   profiling/nsys.sh [-o NAME] [-d DELAY] [-t SECONDS] -- COMMAND...   records NAME.nsys-rep and prints the reports
#   profiling/nsys.sh report NAME.nsys-rep                              prints the reports of a recording
#
# -d: seconds before recording begins (packing the weights, warming up); -t: seconds that it lasts. On a host without nsys:
# moesaic profile --nvtx -- COMMAND, whose summary has the same columns.
set -euo pipefail

usage() {
  sed -n '2,9s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
  exit "$1"
}

# nvtx_pushpop_sum: time by phase, summed over threads. nvtx_pushpop_trace: every range with its parent. osrt_sum: calls of the
# operating system by name: an idle pool shows as sleeps, a barrier as futex waits, a leak of memory maps as mmap.
report() {
  nsys stats --force-export=true --report nvtx_pushpop_sum --report osrt_sum --format table "$1"
  # The trace is long: to a file beside the recording.
  nsys stats --report nvtx_pushpop_trace --format csv --output "${1%.nsys-rep}" "$1"
}

need_nsys() {
  command -v nsys > /dev/null && return
  echo "error: there is no nsys on this host; moesaic profile --nvtx -- COMMAND prints the same summary of ranges" >&2
  exit 1
}

[[ ${1:-} == --help ]] && usage 0
[[ ${1:-} == report && $# == 2 ]] && {
  need_nsys
  report "$2"
  exit
}
name=moesaic times=()
while getopts o:d:t:h option; do
  case $option in
    o) name=$OPTARG ;;
    d) times+=("--delay=$OPTARG") ;;
    t) times+=("--duration=$OPTARG" --kill=none) ;; # the program goes on after the recording
    h) usage 0 ;;
    *) usage 2 ;;
  esac
done
shift $((OPTIND - 1))
(($# > 0)) || usage 2
need_nsys

# No sampling of instruction pointers: it would interrupt the very threads whose phases are timed. Context switches of the whole
# process tree are kept, so that the time line shows which worker waited for a core.
nsys profile --trace=nvtx,osrt --sample=none --cpuctxsw=process-tree --force-overwrite=true --output="$name" "${times[@]}" "$@"
report "$name.nsys-rep"
