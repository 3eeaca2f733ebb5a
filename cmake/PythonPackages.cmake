# What Python packages bring for the build: pybind11, the NVTX headers, oneDNN. They are asked of the interpreter that will
# run the module (importlib.metadata knows where a package's files are, under build isolation too).
#
# Sets pybind11_DIR, dnnl_DIR and MOESAIC_NVTX_INCLUDE_DIR where they are found and not set by the user.

find_package(Python 3.10 QUIET COMPONENTS Interpreter)

# moesaic_locate(VARIABLE DISTRIBUTION FILE): the folder of a distribution's file whose path ends with FILE.
function(moesaic_locate variable distribution file)
  if(${variable} OR NOT Python_Interpreter_FOUND)
    return()
  endif()
  execute_process(
    COMMAND
      ${Python_EXECUTABLE} -c
      "import importlib.metadata as m, os, sys
name, end = sys.argv[1:]
paths = [os.path.realpath(f.locate()) for f in m.files(name) or [] if str(f).endswith(end)]
print(os.path.dirname(next(p for p in paths if os.path.exists(p))))"
      ${distribution} ${file}
    OUTPUT_VARIABLE folder
    OUTPUT_STRIP_TRAILING_WHITESPACE
    RESULT_VARIABLE failed
    ERROR_QUIET)
  if(NOT failed)
    set(${variable} ${folder} CACHE PATH "Found in the Python package ${distribution}")
    mark_as_advanced(${variable})
  endif()
endfunction()

moesaic_locate(pybind11_DIR pybind11 /pybind11Config.cmake)
moesaic_locate(dnnl_DIR onednn-devel-cpu-gomp /dnnl-config.cmake)
moesaic_locate(moesaic_nvtx3_headers nvidia-nvtx /nvtx3/nvToolsExt.h)
if(moesaic_nvtx3_headers AND NOT MOESAIC_NVTX_INCLUDE_DIR)
  get_filename_component(folder ${moesaic_nvtx3_headers} DIRECTORY)
  set(MOESAIC_NVTX_INCLUDE_DIR ${folder} CACHE PATH "Folder that holds nvtx3/nvToolsExt.h")
endif()
find_path(MOESAIC_NVTX_INCLUDE_DIR nvtx3/nvToolsExt.h HINTS ENV CUDA_HOME PATH_SUFFIXES include
          DOC "Folder that holds nvtx3/nvToolsExt.h")
if(MOESAIC_NVTX_INCLUDE_DIR)
  message(STATUS "NVTX: ${MOESAIC_NVTX_INCLUDE_DIR}")
else()
  message(STATUS "NVTX: headers not found, ranges are timers only")
endif()
