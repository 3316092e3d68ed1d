// sum += more, element by element: with the bits of torch's `add_`, which adds halves in float and
// rounds after each addition.
#pragma once

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <bit>
#include <cstdint>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace minidp {

template <typename T>
struct Adder {
  static void add(T* sum, const T* more, int64_t n) {
    for (int64_t i = 0; i < n; ++i) {
      sum[i] = static_cast<T>(more[i] + sum[i]);
    }
  }
};

inline float wide(c10::BFloat16 x) {
  return std::bit_cast<float>(uint32_t{x.x} << 16);
}

// In integers, which the compiler vectorises; see flatten.cpp.
inline c10::BFloat16 narrow(float x) {
  const auto bits = std::bit_cast<uint32_t>(x);
  const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  return c10::BFloat16(
      x != x ? uint16_t{0x7fc0} : static_cast<uint16_t>(rounded), c10::BFloat16::from_bits());
}

template <>
struct Adder<c10::BFloat16> {
  static void add(c10::BFloat16* sum, const c10::BFloat16* more, int64_t n) {
    for (int64_t i = 0; i < n; ++i) {
      sum[i] = narrow(wide(more[i]) + wide(sum[i]));
    }
  }
};

template <>
struct Adder<c10::Half> {
  static void add(c10::Half* sum, const c10::Half* more, int64_t n) {
    int64_t i = 0;
#if defined(__F16C__) && defined(__AVX__)
    for (; i + 8 <= n; i += 8) {
      const auto a = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(more + i)));
      const auto b = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(sum + i)));
      _mm_storeu_si128(
          reinterpret_cast<__m128i*>(sum + i),
          _mm256_cvtps_ph(_mm256_add_ps(a, b), _MM_FROUND_TO_NEAREST_INT));
    }
#endif
    for (; i < n; ++i) {
      sum[i] = static_cast<c10::Half>(static_cast<float>(more[i]) + static_cast<float>(sum[i]));
    }
  }
};

}  // namespace minidp
