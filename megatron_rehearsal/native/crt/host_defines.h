// What CUDA's headers need of the compiler's part of CUDA, which torch's wheels lack.
#pragma once
#define __host__
#define __device__
#define __global__
#define __noinline__ __attribute__((noinline))
#define __forceinline__ inline __attribute__((always_inline))
#define __device_builtin__
#define __device_builtin_texture_type__
#define __device_builtin_surface_type__
#define __cudart_builtin__
#define __no_return__ __attribute__((noreturn))
#define __align__(n) __attribute__((aligned(n)))
#define __builtin_align__(n) __align__(n)
#define __specialization_static static
#define CUDARTAPI
#define CUDARTAPI_CDECL
