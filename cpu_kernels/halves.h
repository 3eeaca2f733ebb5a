// Two vectors as one of twice the lanes, where the machine has none so long. (Of GCC's own vectors that are longer than the
// machine's every operation goes through memory, and comparisons element by element.)
//
// Halves of halves, down to a vector of the machine, which has the operators of the language. What else there is for vectors,
// `Select` say, is overloaded for halves in the same way.
#pragma once

#include <cstring>
#include <type_traits>

#include "cpu_kernels/gemm/tiles.h"

namespace {

template <class V>
struct Halves {
  V low, high;

  /// The same bits as other numbers, as GCC's vectors are converted.
  template <class U>
  MOESAIC_INLINE explicit operator Halves<U>() const {
    return {(U)low, (U)high};
  }
};

template <class T>
inline constexpr bool kIsHalves = false;
template <class V>
inline constexpr bool kIsHalves<Halves<V>> = true;
/// Two operands: halves, or halves and a number.
template <class A, class B>
concept HaveHalves = kIsHalves<A> || kIsHalves<B>;

/// Half of a vector; a number is in both.
template <class V>
MOESAIC_INLINE const V& LowOf(const Halves<V>& x) {
  return x.low;
}
template <class V>
MOESAIC_INLINE const V& HighOf(const Halves<V>& x) {
  return x.high;
}
template <class T>
  requires std::is_arithmetic_v<T>
MOESAIC_INLINE T LowOf(T x) {
  return x;
}
template <class T>
  requires std::is_arithmetic_v<T>
MOESAIC_INLINE T HighOf(T x) {
  return x;
}

template <class V>
MOESAIC_INLINE Halves<V> operator-(const Halves<V>& a) {
  return {-a.low, -a.high};
}
template <class V>
MOESAIC_INLINE Halves<V> operator~(const Halves<V>& a) {
  return {~a.low, ~a.high};
}

template <class A, class B>
  requires HaveHalves<A, B>
MOESAIC_INLINE auto operator+(const A& a, const B& b) {
  return Halves{LowOf(a) + LowOf(b), HighOf(a) + HighOf(b)};
}
template <class A, class B>
  requires HaveHalves<A, B>
MOESAIC_INLINE auto operator-(const A& a, const B& b) {
  return Halves{LowOf(a) - LowOf(b), HighOf(a) - HighOf(b)};
}
template <class A, class B>
  requires HaveHalves<A, B>
MOESAIC_INLINE auto operator*(const A& a, const B& b) {
  return Halves{LowOf(a) * LowOf(b), HighOf(a) * HighOf(b)};
}
template <class A, class B>
  requires HaveHalves<A, B>
MOESAIC_INLINE auto operator/(const A& a, const B& b) {
  return Halves{LowOf(a) / LowOf(b), HighOf(a) / HighOf(b)};
}
template <class A, class B>
  requires HaveHalves<A, B>
MOESAIC_INLINE auto operator&(const A& a, const B& b) {
  return Halves{LowOf(a) & LowOf(b), HighOf(a) & HighOf(b)};
}
template <class A, class B>
  requires HaveHalves<A, B>
MOESAIC_INLINE auto operator|(const A& a, const B& b) {
  return Halves{LowOf(a) | LowOf(b), HighOf(a) | HighOf(b)};
}
/// Comparisons give masks.
template <class V>
MOESAIC_INLINE auto operator<(const Halves<V>& a, const Halves<V>& b) {
  return Halves{a.low < b.low, a.high < b.high};
}
template <class V>
MOESAIC_INLINE auto operator<=(const Halves<V>& a, const Halves<V>& b) {
  return Halves{a.low <= b.low, a.high <= b.high};
}
template <class V>
MOESAIC_INLINE auto operator==(const Halves<V>& a, const Halves<V>& b) {
  return Halves{a.low == b.low, a.high == b.high};
}
template <class V>
MOESAIC_INLINE Halves<V> operator<<(const Halves<V>& a, int bits) {
  return {a.low << bits, a.high << bits};
}
template <class V>
MOESAIC_INLINE Halves<V> operator>>(const Halves<V>& a, int bits) {
  return {a.low >> bits, a.high >> bits};
}
template <class V, class B>
MOESAIC_INLINE Halves<V>& operator+=(Halves<V>& a, const B& b) {
  return a = a + b;
}
template <class V, class B>
MOESAIC_INLINE Halves<V>& operator*=(Halves<V>& a, const B& b) {
  return a = a * b;
}

/// A vector from memory, at any address, and to it: by the machine's vectors.
template <class V>
MOESAIC_INLINE V LoadVector(const void* p) {
  if constexpr (kIsHalves<V>) {
    using Half = decltype(V::low);
    return {LoadVector<Half>(p), LoadVector<Half>(static_cast<const char*>(p) + sizeof(Half))};
  } else {
    V v;
    std::memcpy(&v, p, sizeof(v));
    return v;
  }
}
template <class V>
MOESAIC_INLINE void StoreVector(void* p, const V& v) {
  std::memcpy(p, &v, sizeof(v));
}
template <class V>
MOESAIC_INLINE void StoreVector(void* p, const Halves<V>& v) {
  StoreVector(p, v.low);
  StoreVector(static_cast<char*>(p) + sizeof(V), v.high);
}

}  // namespace
