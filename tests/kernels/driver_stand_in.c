/* A stand-in for libcuda.so.1, built against the real header: it keeps what a launch was given. */
#include <cuda.h>
#include <string.h>

/* What a CUfunction of the stand-in points to. */
struct function {
  size_t count;
  size_t offsets[16];
  size_t sizes[16];
};

/* driver_stand_in.py reads this with the same fields. */
struct record {
  unsigned launches;
  unsigned grid[3];
  unsigned block[3];
  unsigned shared_bytes;
  unsigned num_attributes;
  int attribute;
  int attribute_value;
  int answer; /* what the next calls return */
  unsigned long long stream;
  unsigned long long parameters[16];
};

struct record record;

CUresult cuFuncGetParamInfo(CUfunction handle, size_t index, size_t *offset, size_t *size) {
  const struct function *function = (const struct function *)handle;
  if (index >= function->count)
    return CUDA_ERROR_INVALID_VALUE;
  *offset = function->offsets[index];
  *size = function->sizes[index];
  return CUDA_SUCCESS;
}

CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction handle, void **parameters,
                          void **extra) {
  const struct function *function = (const struct function *)handle;
  if (extra != NULL)
    return CUDA_ERROR_INVALID_VALUE;
  record.launches += 1;
  record.grid[0] = config->gridDimX;
  record.grid[1] = config->gridDimY;
  record.grid[2] = config->gridDimZ;
  record.block[0] = config->blockDimX;
  record.block[1] = config->blockDimY;
  record.block[2] = config->blockDimZ;
  record.shared_bytes = config->sharedMemBytes;
  record.stream = (unsigned long long)config->hStream;
  record.num_attributes = config->numAttrs;
  if (config->numAttrs) {
    record.attribute = (int)config->attrs[0].id;
    record.attribute_value = config->attrs[0].value.programmaticStreamSerializationAllowed;
  }
  memset(record.parameters, 0, sizeof record.parameters);
  for (size_t i = 0; i < function->count; ++i)
    memcpy(&record.parameters[i], parameters[i], function->sizes[i]);
  return (CUresult)record.answer;
}

CUresult cuGetErrorName(CUresult error, const char **name) {
  *name = error == CUDA_ERROR_INVALID_VALUE ? "CUDA_ERROR_INVALID_VALUE" : NULL;
  return *name ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
