#ifndef __MUSA_H__
#define __MUSA_H__

#define MUSA_VERSION 50100

#endif
