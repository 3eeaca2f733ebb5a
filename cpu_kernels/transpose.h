// Transposes of blocks of dwords, and tiles of row pairs: in registers, where there are enough of them.
#pragma once

#include <cstdint>
#include <cstring>

#include "cpu_kernels/simd.h"

namespace {

#if !defined(__AVX512F__)
/// columns[j][i] = rows[i][j] for 8 x 8 dwords in rows `pitch` dwords apart.
MOESAIC_INLINE void LoadTransposed(const float* rows, std::int64_t pitch, U32x8 (&columns)[8]) {
  U32x8 r[8], t[8];
  for (int i = 0; i < 8; ++i) std::memcpy(&r[i], rows + pitch * i, sizeof(r[i]));
  for (int i = 0; i < 8; i += 2) {
    t[i] = __builtin_shufflevector(r[i], r[i + 1], 0, 8, 1, 9, 4, 12, 5, 13);
    t[i + 1] = __builtin_shufflevector(r[i], r[i + 1], 2, 10, 3, 11, 6, 14, 7, 15);
  }
  for (int i = 0; i < 8; i += 4) {
    for (int k = 0; k < 2; ++k) {
      r[i + 2 * k] = __builtin_shufflevector(t[i + k], t[i + 2 + k], 0, 1, 8, 9, 4, 5, 12, 13);
      r[i + 2 * k + 1] = __builtin_shufflevector(t[i + k], t[i + 2 + k], 2, 3, 10, 11, 6, 7, 14, 15);
    }
  }
  for (int i = 0; i < 4; ++i) {
    columns[i] = __builtin_shufflevector(r[i], r[i + 4], 0, 1, 2, 3, 8, 9, 10, 11);
    columns[i + 4] = __builtin_shufflevector(r[i], r[i + 4], 4, 5, 6, 7, 12, 13, 14, 15);
  }
}
#endif

#if defined(__AVX512F__)
/// out[j][i] = r[i][j] of 16 x 16 dwords; `r` is overwritten.
MOESAIC_INLINE void StoreTransposed(__m512i (&r)[16], float* out, std::int64_t out_pitch) {
  __m512i t[16];
  for (int i = 0; i < 8; ++i) {
    t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
  }
  for (int i = 0; i < 4; ++i) {
    r[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
    r[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
  }
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm512_shuffle_i32x4(r[i], r[4 + i], 0x88);
    t[4 + i] = _mm512_shuffle_i32x4(r[i], r[4 + i], 0xdd);
    t[8 + i] = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0x88);
    t[12 + i] = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0xdd);
  }
  for (int i = 0; i < 4; ++i) {
    _mm512_storeu_si512(out + out_pitch * i, _mm512_shuffle_i32x4(t[i], t[8 + i], 0x88));
    _mm512_storeu_si512(out + out_pitch * (4 + i), _mm512_shuffle_i32x4(t[4 + i], t[12 + i], 0x88));
    _mm512_storeu_si512(out + out_pitch * (8 + i), _mm512_shuffle_i32x4(t[i], t[8 + i], 0xdd));
    _mm512_storeu_si512(out + out_pitch * (12 + i), _mm512_shuffle_i32x4(t[4 + i], t[12 + i], 0xdd));
  }
}
#endif

/// Transposes 16 x 16 floats: out[j][i] = in[i][j]; rows are `in_pitch` and `out_pitch` floats apart. In place where these are
/// equal.
inline void Transpose16x16(const float* in, std::int64_t in_pitch, float* out, std::int64_t out_pitch) {
#if defined(__AVX512F__)
  __m512i r[16];
  for (int i = 0; i < 16; ++i) r[i] = _mm512_loadu_si512(in + in_pitch * i);
  StoreTransposed(r, out, out_pitch);
#else
  for (int i = 0; i < 16; i += 8) {
    for (int j = 0; j <= i; j += 8) {
      U32x8 block[8], mirrored[8];
      LoadTransposed(in + in_pitch * i + j, in_pitch, block);
      LoadTransposed(in + in_pitch * j + i, in_pitch, mirrored);
      for (int k = 0; k < 8; ++k) {
        std::memcpy(out + out_pitch * (j + k) + i, &block[k], sizeof(block[k]));
        std::memcpy(out + out_pitch * (i + k) + j, &mirrored[k], sizeof(mirrored[k]));
      }
    }
  }
#endif
}

/// The same for dwords in rows of 64 bytes.
inline void Transpose16x16(const BFloat16* in, BFloat16* out) {
  Transpose16x16(reinterpret_cast<const float*>(in), 16, reinterpret_cast<float*>(out), 16);
}

#if defined(__AVX512F__)
/// rows[r][c] = in[c * pitch + r] for eight rows of 16 columns.
MOESAIC_INLINE void LoadEightTransposed(const float* in, std::int64_t pitch, F32x16 (&rows)[8]) {
  // Lanes of z[c]: rows 0 to 3 and 4 to 7 of column c, then of column c + 8.
  __m512 z[8];
  for (int c = 0; c < 8; ++c) {
    const __m512d low = _mm512_castps_pd(_mm512_castps256_ps512(_mm256_loadu_ps(in + pitch * c)));
    z[c] = _mm512_castpd_ps(_mm512_insertf64x4(low, _mm256_castps_pd(_mm256_loadu_ps(in + pitch * (c + 8))), 1));
  }
  __m512d quad[8];  // lanes of quad[h + r]: row r and row 4 + r of columns h to h + 3, then of h + 8 to h + 11
  for (int h = 0; h < 8; h += 4) {
    const auto ab_low = _mm512_castps_pd(_mm512_unpacklo_ps(z[h], z[h + 1]));
    const auto ab_high = _mm512_castps_pd(_mm512_unpackhi_ps(z[h], z[h + 1]));
    const auto cd_low = _mm512_castps_pd(_mm512_unpacklo_ps(z[h + 2], z[h + 3]));
    const auto cd_high = _mm512_castps_pd(_mm512_unpackhi_ps(z[h + 2], z[h + 3]));
    quad[h] = _mm512_unpacklo_pd(ab_low, cd_low);
    quad[h + 1] = _mm512_unpackhi_pd(ab_low, cd_low);
    quad[h + 2] = _mm512_unpacklo_pd(ab_high, cd_high);
    quad[h + 3] = _mm512_unpackhi_pd(ab_high, cd_high);
  }
  const __m512i low = _mm512_setr_epi64(0, 1, 8, 9, 4, 5, 12, 13), high = _mm512_setr_epi64(2, 3, 10, 11, 6, 7, 14, 15);
  for (int r = 0; r < 4; ++r) {
    rows[r] = (F32x16)_mm512_permutex2var_pd(quad[r], low, quad[4 + r]);
    rows[4 + r] = (F32x16)_mm512_permutex2var_pd(quad[r], high, quad[4 + r]);
  }
}
#endif

/// Interleaves rows (0, 1), (2, 3), ... of a stored tile: row p of `low` holds the pairs of rows 2p and 2p + 1 for columns
/// 0..15, `high` for columns 16..31. This is the right factor of a product over the tile's rows.
template <int kPairs>
MOESAIC_INLINE void InterleaveRowPairs(const BFloat16* rows, BFloat16* low, BFloat16* high) {
  for (int p = 0; p < kPairs; ++p) {
    const BFloat16* first = rows + 64 * p;
    BFloat16* to_low = low + 32 * p;
    BFloat16* to_high = high + 32 * p;
#if defined(__AVX512BW__)
    const __m512i x = _mm512_load_si512(first);
    const __m512i y = _mm512_load_si512(first + 32);
    _mm512_store_si512(to_low, _mm512_unpacklo_epi16(x, y));
    _mm512_store_si512(to_high, _mm512_unpackhi_epi16(x, y));
#else
    for (int lane = 0; lane < 32; lane += 8) {
      const __m128i x = _mm_load_si128(reinterpret_cast<const __m128i*>(first + lane));
      const __m128i y = _mm_load_si128(reinterpret_cast<const __m128i*>(first + 32 + lane));
      _mm_store_si128(reinterpret_cast<__m128i*>(to_low + lane), _mm_unpacklo_epi16(x, y));
      _mm_store_si128(reinterpret_cast<__m128i*>(to_high + lane), _mm_unpackhi_epi16(x, y));
    }
#endif
  }
}

}  // namespace
