// The names of the pool's sources of threads.
#pragma once

#include <stdexcept>
#include <string>

#include "threadpool/pool.h"

namespace moesaic::bindings {

/// Throws std::invalid_argument on another name than "openmp" and "own".
/// @param argument  what is so called, for the message
inline threadpool::ThreadSource SourceNamed(const std::string& source, const char* argument = "source") {
  if (source == "openmp") return threadpool::ThreadSource::kOpenMp;
  if (source == "own") return threadpool::ThreadSource::kOwn;
  throw std::invalid_argument(std::string(argument) + " is \"" + source + "\"; expected \"openmp\" or \"own\"");
}

}  // namespace moesaic::bindings
